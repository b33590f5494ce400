"""A net of drawn ways of using a model, beside plain transformers as the truth.

1. A draw names one value of each dimension (`draws.DIMENSIONS`): family, attention, wrapper, rows and padding, length,
   what is done to the cache, how the model is called, options of `generate`, what else runs, an intervention, and the
   device (`--only device=cuda`, where there is one).
2. The truth comes by plain means (`edits`): a zeroed column, a plain hook, or the same intervention on each row alone.
3. Five promises are checked (`promises`): right, alone, clean, words, seen.
4. A draw that fails is made smaller until only what matters is left (`draws`).

5. Causes that are not mended yet stand in `known`, and have to fail.

`python -m tests.ways --seconds 600 --only edit=zero` draws for as long as one likes; `test_net` is part of the suite.
"""
