"""Where `target_of` was; scripts that import it from here go on working."""

from sinkscope.opening.load import target_of as target_of
