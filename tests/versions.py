"""What older versions that are allowed do not do."""

import transformers
from packaging.version import Version

OLD_TRANSFORMERS = Version(transformers.__version__) < Version("5.18")
"""Attention of the type moshi differs there from what is recomputed, and `DynamicCache.reset` leaves its tokens."""
