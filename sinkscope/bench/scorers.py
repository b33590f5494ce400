"""Scores of answers, 0 to 1, as the benchmarks define them; exact match for our own."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from sinkscope.bench.dialogues.recall import END
from sinkscope.errors import SinkscopeError

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_FIRST_LINE = {"trec", "samsum"}  # LongBench scores the first line of what was said
_MARKS = (  # ASCII and Chinese punctuation
    string.punctuation
    + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～"
    + "｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"
)
Metric = Callable[[str, Sequence[str], Sequence[str]], float]


def score(metric: str, said: str, answers: Sequence[str], *, classes: Sequence[str] = (), task: str = "") -> float:
    """The best score of an output over all correct answers.

    Args:
        metric: A name in `METRICS`.
        said: The model's output.
        answers: Correct answers, at least one.
        classes: The possible class names, for "accuracy"; the functions of the repository, for "function".
        task: Name of the task; two of LongBench's tasks are scored on the first line only.

    Raises:
        SinkscopeError: The metric is unknown, or the library for Rouge is not installed.
    """
    if metric not in METRICS:
        raise SinkscopeError(f"metric {metric!r} is unknown: expected one of {', '.join(METRICS)}")
    if task in _FIRST_LINE:
        said = said.lstrip("\n").split("\n")[0]
    return float(METRICS[metric](said, answers, classes))


def _until_end(text: str) -> list[str]:
    words = text.split()
    return words[: words.index(END)] if END in words else words


def f1(said: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of both texts, with multiplicity.

    Case, ASCII punctuation and articles are ignored. 0 if no word is shared.
    """
    return _overlap(normalise(said).split(), normalise(answer).split())


def _overlap(found: list[str], wanted: list[str]) -> float:
    same = sum((Counter(found) & Counter(wanted)).values())
    if not same:
        return 0.0
    precision, recall = same / len(found), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def best_f1(said: str, answers: Iterable[str]) -> float:
    """The best `f1` over the correct answers; 0 if there are none."""
    return max((f1(said, answer) for answer in answers), default=0.0)


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, then without articles; one space between words."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def accuracy(said: str, answer: str, classes: Sequence[str]) -> float:
    """1 divided by the number of classes named in the output if the correct one is among them, otherwise 0.

    A class whose name is a proper part of the correct class's name does not count as named.
    """
    named = [c for c in classes if c in said and not (c in answer and c != answer)]
    return 1 / len(named) if answer in named else 0.0


def rouge_l(said: str, answers: Sequence[str], kind: str = "rougeL") -> float:
    """F-measure of the longest common subsequence of words, by the library rouge-score, without stemming.

    Raises:
        SinkscopeError: The library is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise SinkscopeError("Rouge-L needs the library rouge-score: pip install rouge-score") from None
    scorer = RougeScorer([kind])
    return max(float(scorer.score(answer, said)[kind].fmeasure) for answer in answers)


def letter(said: str, answers: Sequence[str]) -> float:
    """1 if the output chooses the correct one of four options (SCBench); `answers` are its text and its letter.

    The first letter counts; failing that, what follows "answer is" and similar; failing that, the first word A, B, C or
    D.
    """
    said = said.strip()
    if said[:1] and (said[0] in "ABCD" or said in answers):
        return float((said[0] if said[0] in "ABCD" else said) in answers)
    said = re.sub(" +", " ", re.sub("[\n\"'.,?!{}]", " ", said))
    for prefix in ("answer is:", "answer:", "answer is", "option is"):
        if prefix in said:
            return float(said.partition(prefix)[2][1:].startswith(tuple(answers)))
    return float(next((word for word in said.split() if word in "ABCD"), "") in answers)


def _stated(said: str) -> str:
    """The letter that is said to be the correct answer, in LongBench v2's words; empty: none is."""
    said = said.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", said) or re.search(r"The correct answer is ([A-D])", said)
    return found[1] if found else ""


def paragraph(said: str, answer: str) -> float:
    """Share of the numbers in the output that are the correct paragraph's, "Paragraph 7" (LongBench, retrieval)."""
    numbers, right = _digits(said), re.search(r"Paragraph (\d+)", answer)
    return numbers.count(right[1]) / len(numbers) if numbers and right else 0.0


def first_number(said: str, answer: str) -> float:
    """1 if the first number in the output is correct; if the correct number is whole, only its whole part counts."""
    found = re.search(r"\d+\.\d+|\d+", said)
    if found is None:
        return 0.0
    return float(int(float(found[0])) == int(answer) if answer.isdigit() else float(found[0]) == float(answer))


def _digits(text: str) -> list[str]:
    return re.findall(r"[0-9]+", text)


def every(said: str, answer: str) -> float:
    """Share of the answer's comma-separated parts that occur in the output, ignoring case (RULER; SCBench)."""
    parts = answer.split(", ")
    return sum(part.lower() in said.lower() for part in parts) / len(parts)


def f1_characters(said: str, answer: str) -> float:
    """F1 over characters, without spaces and punctuation (Chinese answers of SCBench)."""
    found, wanted = ([c for c in text.lower() if not (c.isspace() or c in _MARKS)] for text in (said, answer))
    return _overlap(found, wanted)


def function(said: str, answers: Sequence[str], functions: Sequence[str]) -> float:
    """1 if the output reproduces a correct function: the most similar of the repository, by at least 0.8 (RepoQA).

    Similarity is word-level `bleu`. Only the first code block of the output counts; without one, the whole output.
    """
    block = re.search(r"^```(?:\w+)?[ \t]*\n(.*?)^```", said.strip(), re.S | re.M)
    found = (block[1] if block else said).split()
    best = max(functions or answers, key=lambda each: bleu(found, each.split()))
    return float(best in answers and bleu(found, best.split()) >= 0.8)


def bleu(said: Sequence[str], reference: Sequence[str]) -> float:
    """BLEU-4 of one sentence, with the smoothing for short ones that NLTK calls method 4 (Chen and Cherry 2014)."""
    total, misses = 0.0, 0
    for n in range(1, 5):
        ours, theirs = (Counter(zip(*(words[i:] for i in range(n)), strict=False)) for words in (said, reference))
        same = (ours & theirs).total()
        if n == 1 and not same:
            return 0.0
        if not same and len(said) > 1:
            misses += 1
            same = math.log(len(said)) / (5 * 2**misses)
        if same:
            total += math.log(same / max(ours.total(), 1)) / 4
    return math.exp(total + min(0.0, 1 - len(reference) / len(said)))


def _best(one: Callable[[str, str], float]) -> Metric:
    return lambda said, answers, _: max(one(said, answer) for answer in answers)


METRICS: dict[str, Metric] = {
    "f1": _best(f1),
    # the same words, up to the end mark of the recall model, which decoders may leave out
    "exact": _best(lambda said, answer: float(_until_end(said) == _until_end(answer))),
    "contains": _best(lambda said, answer: float(answer in said)),
    "any-case": _best(lambda said, answer: float(answer.lower() in said.lower())),
    "all": _best(every),
    "paragraph": _best(paragraph),
    # LongBench v2: the output names this letter as the correct answer in the requested wording
    "stated-letter": _best(lambda said, answer: float(_stated(said) == answer)),
    # LongEval's lines: the last number that is said
    "last-number": _best(lambda said, answer: float([*map(int, _digits(said)[-1:])] == [*map(int, _digits(answer))])),
    "first-number": _best(first_number),
    # SCBench's pass keys: the first digits that are said
    "first-digits": _best(lambda said, answer: float(_digits(said)[:1] == [answer])),
    "f1-characters": _best(f1_characters),
    "accuracy": lambda said, answers, classes: max(accuracy(said, answer, classes) for answer in answers),
    "rouge-l": lambda said, answers, _: rouge_l(said, answers),
    "rouge-lsum": lambda said, answers, _: rouge_l(said, answers, "rougeLsum"),
    "letter": lambda said, answers, _: letter(said, answers),
    "function": function,
}
"""By name: the score of (what was said, right answers, classes). `text.published.SETS` says which set has which."""
