"""Each notebook runs with SmolLM2 by its first line."""

from __future__ import annotations

import pytest

from tools.notebooks import FOLDER, ran

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_with_smollm2(smollm2, path):
    ran(path, smollm2.path)  # a cell that fails raises
