"""The numbers of the paper's tables (Xu et al. 2026), shown next to ours."""

from __future__ import annotations

MODELS = ("Qwen3-1.7B", "Llama-3.2-1B")
TABLE1: dict[tuple[str, str], dict[str, tuple[float, float, float, float]]] = {  # CR, TTR, average length, loop rate
    ("dc", "Qwen3-1.7B"): {
        "full": (0.064, 0.086, 2495.0, 1.0),
        "streaming": (0.085, 0.118, 2496.0, 1.0),
        "h2o": (0.052, 0.079, 2495.0, 1.0),
        "loopguard:paper": (0.219, 0.528, 1326.0, 0.013),
    },
    ("dc", "Llama-3.2-1B"): {
        "full": (0.044, 0.065, 2498.0, 1.0),
        "streaming": (0.058, 0.087, 2498.0, 1.0),
        "h2o": (0.039, 0.054, 2496.0, 1.0),
        "loopguard:paper": (0.207, 0.495, 1382.0, 0.017),
    },
    ("ri", "Qwen3-1.7B"): {
        "full": (0.105, 0.097, 2379.0, 0.935),
        "streaming": (0.097, 0.122, 2418.0, 0.972),
        "h2o": (0.080, 0.095, 2486.0, 0.998),
        "loopguard:paper": (0.261, 0.474, 1412.0, 0.027),
    },
    ("ri", "Llama-3.2-1B"): {
        "full": (0.089, 0.119, 2479.0, 0.947),
        "streaming": (0.081, 0.097, 2485.0, 0.984),
        "h2o": (0.068, 0.084, 2496.0, 1.0),
        "loopguard:paper": (0.305, 0.489, 1457.0, 0.023),
    },
}
TABLE2 = {"full": 50.49, "streaming": 21.05, "h2o": 33.73, "loopguard:paper": 53.61}  # F1; the model is not named
TABLE3: dict[str, tuple[float, float, float | None]] = {  # loop rate, interventions, early; set and model not named
    "full": (1.0, 0.0, None),
    "loopguard:paper:variant=always": (0.798, 12.5, 0.576),
    "loopguard:paper:variant=p1": (0.354, 7.6, 0.212),
    "loopguard:paper": (0.013, 4.8, 0.017),
}


def published_model(name: str) -> str | None:
    """The paper's name for a model; None if the paper has no numbers for it."""
    parts = []
    for c in name.lower():
        if c.isalnum():
            parts.append(c)
    plain = "".join(parts)
    return next((m for m in MODELS if "".join(c for c in m.lower() if c.isalnum()) == plain), None)


def without_budget(method: str) -> str:
    """A method without its budget, as the tables here name it."""
    parts = []
    for part in method.split(":"):
        if not part[0].isdigit():
            parts.append(part)
    return ":".join(parts)
