"""Small wrong changes of the code, each of which the tests named beside it must notice.

A mutant is a fragment of the source and what replaces it. The fragment is looked for in all files of the package, so
that moving code does not matter; a fragment that is not found exactly once is reported as stale. The tests run in a
copy of the tree:

    python -m experiments.mutants --list
    python -m experiments.mutants --only causal-without-control
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
TIMEOUT = 120  # seconds of one test

SINKS = "test_find_sinks.py"
LOOPS = "test_loops_signals.py test_loops_monitor.py"
PLAN = "test_loopguard_plan.py"
GUARD = "test_loopguard.py test_loopguard_organism.py"
POLICIES = "test_policies.py test_kv_evict.py"
CACHE = "test_kv_cache.py test_kv_evict.py test_kv_room.py"
LINES = "test_lines.py test_line_sums.py"
SELECT = "test_loopserve_select.py"
SPARSE = "test_loopserve_sparse.py test_loopserve_flex.py"

# name, test files, fragment, replacement; white space counts only as white space
MUTANTS = (
    # sinks: proof by ablation
    ("causal-without-control", SINKS, "drop > chance and drop >= CAUSAL", "drop >= CAUSAL"),
    ("causal-without-threshold", SINKS, "drop > chance and drop >= CAUSAL", "drop > chance"),
    ("control-is-the-mean", SINKS, "drops(singles, first), drops(control, first).max()",
     "drops(singles, first), drops(control, first).mean()"),
    ("control-of-repeats-is-the-mean", SINKS, "torch.maximum(by_chance, drops(control, repeated).max())",
     "torch.maximum(by_chance, drops(control, repeated).mean())"),
    ("control-without-repeats", SINKS, "torch.maximum(by_chance, drops(control, repeated).max())", "by_chance"),
    ("control-of-the-set-is-the-mean", SINKS, "float(drops(set_controls, first).max())",
     "float(drops(set_controls, first).mean())"),
    ("neutral-values-with-first-tokens", SINKS, "where[:, 0] = False experts =", "experts ="),
    ("neutral-value-is-the-mean", SINKS, "return float(post.median()), None if", "return float(post.mean()), None if"),
    ("neutral-value-of-routed-expert", SINKS, "post[asked] / text.routing[asked, expert] if", "post[asked] if"),
    ("controls-among-candidates", SINKS, "spare[top] = False", "pass"),
    ("few-draws", SINKS, "DRAWS = 20", "DRAWS = 2"),
    ("drop-is-the-least", SINKS, "/ view.resid.norm(dim=-1)).median(1).values", "/ view.resid.norm(dim=-1)).amin(1)"),
    # sinks: stages of the first token's norm
    ("stage-by-growth-alone", SINKS, "if builds or (grows and self.mlp_first[i] >", "if grows or (self.mlp_first[i] >"),
    ("stage-of-usual-size", SINKS, "and along > STAGE_OUTLIER * usual", "and along > usual"),
    ("sink-layer-is-the-first-stage", SINKS, "max(self.stages(), key=lambda i: self.mlp_first[i], default=None)",
     "min(self.stages(), default=None)"),
    ("sink-without-ratio", SINKS, "self.first[i] > SINK_RATIO * self.typical[i][1]", "self.first[i] > self.typical[i][1]"),
    ("walk-stops-early", SINKS, "max(3, math.ceil(self.n_layers / 3))", "1"),
    # sinks: marking, separation, convergence
    ("margin-to-the-mean", "test_separability.py", "values[~first].max(0).values) / span", "values[~first].mean(0)) / span"),
    ("separator-never-turned", "test_separability.py", "torch.where(area < 0.5, -1.0, 1.0)", "torch.ones_like(area)"),
    ("separator-ties-by-area-alone", "test_separability.py", "(area.double() + 1e-9 * gap.double()).argmax()", "area.argmax()"),
    ("direction-not-normed", "test_separability.py", "way / way.norm())", "way)"),
    ("bound-without-heads", "test_converge.py", "2 * k * r[:, None] * delta.exp() / n", "2 * r[:, None] * delta.exp() / n"),
    ("no-bound-reached", "test_converge.py", "torch.where(distance > floor, distance / bound, 0.0)", "distance / bound * 0.0"),
    # kv: policies
    ("adakv-ties", "test_adakv.py", "scores.argsort(dim=-1, stable=True).flip(-1)",
     "scores.argsort(dim=-1, descending=True, stable=True)"),
    ("adakv-rounds-down-whole-numbers", "test_adakv.py", "+ self.floor * base + 1e-6).floor()", "+ self.floor * base).floor()"),
    ("adakv-no-floor", "test_adakv.py", "(1 - self.floor) * share.double() + self.floor * base", "share.double()"),
    ("adakv-all-fit", "test_adakv.py", "(free.sum((1, 2)) <= total)[:, None]", "(free.sum((1, 2)) < 0)[:, None]"),
    ("h2o-forgets", POLICIES, 'rows.kv.extra("h2o") + received', "received"),
    ("h2o-padding-counts", POLICIES, "real = (rows.query_pos >= 0).to(rows.probs)", "real = (rows.query_pos >= -1).to(rows.probs)"),
    ("h2o-recent-ignored", POLICIES, "late = at.kv.pos >= (at.length - recent)[:, None, None]",
     "late = at.kv.pos >= at.length[:, None, None]"),
    ("snapkv-window-votes-for-itself", POLICIES, "votes = votes.masked_fill(inside, 0)", "pass"),
    ("snapkv-always-average", POLICIES, 'functional.avg_pool1d if self.pooling == "avg" else functional.max_pool1d',
     "functional.avg_pool1d"),
    ("snapkv-pool-shifted", POLICIES, "self.kernel, stride=1, padding=self.kernel // 2)",
     "self.kernel, stride=1, padding=self.kernel // 2).roll(1, -1)"),
    ("tova-heads-apart", POLICIES, "newest = self.group(rows.probs[:, :, -1], 1)",
     "newest = self.group(rows.probs[:, :, -1], rows.pos.shape[1])"),
    ("streaming-earliest", POLICIES, "return at.kv.pos.float()", "return -at.kv.pos.float()"),
    ("group-sum-is-mean", POLICIES, 'grouped.mean(2) if self.reduce == "mean" else grouped.sum(2)', "grouped.mean(2)"),
    ("fraction-rounded-up", POLICIES, "rows = (prompt * self.budget).long()", "rows = (prompt * self.budget).ceil().long()"),
    ("policy-acts-once", POLICIES, 'elif self.every == "prefill" or state.decoded % self.every:', "else:"),
    # kv: cache
    ("rebase-backwards", "test_kv_rebase.py", "[a * cos - b * sin, b * cos + a * sin, rest]",
     "[a * cos + b * sin, b * cos - a * sin, rest]"),
    ("rebase-by-all-held", "test_kv_rebase.py", "(kept.cumsum(-1) - held.cumsum(-1))", "(kept.cumsum(-1) * 0)"),
    ("evict-brings-holes", CACHE, "keep = keep & (pos >= 0)", "keep = keep & (pos >= -1)"),
    ("evicted-positions-stay", CACHE, "self._pos = torch.where(keep, pos, -1)", "self._pos = pos"),
    ("crop-keeps-later", CACHE, "stays = (self.pos >= 0) & (self.pos <= last", "stays = (self.pos >= 0) & (self.pos < last"),
    ("room-always-fits", CACHE, "and self.filled + new <= self.slots", "and True"),
    ("room-of-another", CACHE, "self.filled == keys.shape[-2] == values.shape[-2]", "True"),
    ("peak-is-the-latest", "test_kv_fields.py test_kv_generate.py test_policies.py",
     "self._sum + held, torch.maximum(self._peak, peak)", "self._sum + held, peak"),
    # loops
    ("novelty-window-longer", LOOPS, "ends = range(max(n - 1, i - window + n), i)", "ends = range(max(n - 1, i - window), i)"),
    ("tail-takes-later-period", LOOPS, "shortest) and covered > best:", "shortest) and covered >= best:"),
    ("tail-of-two", LOOPS, "covered >= max(repeats * period, shortest)", "covered >= max(2 * period, shortest)"),
    ("loop-of-any-length", LOOPS, "return len(ids) >= theta_len and type_token_ratio(ids)", "return type_token_ratio(ids)"),
    ("loop-by-ratio-alone", LOOPS, "type_token_ratio(ids) <= theta_ttr and compression_ratio(ids) <= theta_cr",
     "type_token_ratio(ids) <= theta_ttr"),
    ("collapse-at-threshold", LOOPS, "if value >= theta: break", "if value > theta: break"),
    ("survival-strict", LOOPS, "p is None or p > step for p in points", "p is None or p >= step for p in points"),
    ("types-window-longer", LOOPS, "if len(tokens) > self.window:", "if len(tokens) > self.window + 1:"),
    ("novelty-span-longer", LOOPS, "if len(self._flags) > self._span:", "if len(self._flags) > self._span + 1:"),
    ("streak-never-ends", LOOPS, "self._streak + 1 if p_max is not None and p_max > s.theta_conf else 0",
     "self._streak + 1 if p_max is not None and p_max > s.theta_conf else self._streak"),
    ("streak-one-late", LOOPS, "votes += self._streak >= s.streak", "votes += self._streak > s.streak"),
    ("needs-all-voters-without-p", LOOPS, "needed = min(needed, len(s.voters) - 1)", "pass"),
    ("no-cooldown", LOOPS, "(since is None or since > s.cooldown)", "True"),
    ("cooldown-one-short", LOOPS, "(since is None or since > s.cooldown)", "(since is None or since >= s.cooldown)"),
    ("level-never-reset", LOOPS, "self._level + 1 if since is not None and since <= s.relapse else 0",
     "self._level + 1 if since is not None else 0"),
    ("gates-all-needed", LOOPS, '(stall and "stall" in s.gates) or (tail_rep and "tail" in s.gates)',
     '(stall and "stall" in s.gates) and (tail_rep and "tail" in s.gates)'),
    ("guard-keeps-bad", PLAN, "if p >= max(begin, retention.anchors) and p not in gone]",
     "if p >= max(begin, retention.anchors)]"),
    ("guard-history-with-recent", PLAN, "if retention.anchors <= p < begin and p not in in_history",
     "if retention.anchors <= p and p not in in_history"),
    ("guard-uniform-from-the-left", PLAN, "positions[(2 * i + 1) * total // (2 * count)]", "positions[i * total // count]"),
    ("guard-level-unbounded", PLAN, "max(1, at_first >> min(level, self.max_level))", "max(1, at_first >> level)"),
    ("guard-first-gram-is-repeated", PLAN + " " + GUARD, "if gram in seen: found.append(i)", "found.append(i)"),
    # lines
    ("lines-choice-inverted", SELECT, "per_s >= per_v", "per_s < per_v"),
    ("lines-choice-ties", SELECT, "per_s >= per_v", "per_s > per_v"),
    ("lines-slash-by-gain-alone", SELECT, "gain_s / max(1, lengths[s] - len(chosen_v))", "gain_s"),
    ("lines-missing-ignores-alpha", SELECT, "dtype=torch.float64) - (1 - alpha) * rows", "dtype=torch.float64)"),
    ("lines-take-one-less", SELECT, "gain.cumsum(1) - gain < missing[:, None]", "gain.cumsum(1) < missing[:, None]"),
    ("lines-cells-count-crossings-twice", SPARSE, "(both - self.vertical * self.crossed(self.slash)).sum(1)", "both.sum(1)"),
    ("lines-see-the-future", SELECT, "offset.clamp(min=0)]) & (offset >= 0)", "offset.clamp(min=0)])"),
    ("lines-cells-without-crossings", LINES, "(own - twice) / (keys * (keys + 1) / 2)", "own / (keys * (keys + 1) / 2)"),
    ("lines-without-weight", LINES, "(rank < most[:, None, None]) & (both > 0)", "rank < most[:, None, None]"),
    ("lines-half-as-many", LINES, "math.floor(eta * 2 * size + 1e-9)", "math.floor(eta * size + 1e-9)"),
    ("lines-floor-of-rounding", LINES, "math.floor(eta * 2 * size + 1e-9)", "math.floor(eta * 2 * size)"),
    ("jaccard-over-the-sum", LINES + " test_overlap.py", "(a.counts() + b.counts() - both).clamp(min=1)",
     "(a.counts() + b.counts()).clamp(min=1)"),
    ("random-lines-overfull", LINES, "reached = drawn.cumsum(1) - drawn / 2", "reached = drawn.cumsum(1) - drawn"),
    ("mass-counts-crossings-twice", LINES, "summed - crossings(scores, both.vertical, both.slash)", "summed"),
    ("flex-block-whole-too-soon", SPARSE, "(there == most - least + 1) & (shut == 0) & (least >= 0)",
     "(there == most - least + 1) & (least >= 0)"),
    ("flex-block-empty-too-soon", SPARSE, "some = columns[:, None, ::BLOCK] <= last[:, None]",
     "some = columns[:, None, ::BLOCK] <= first[:, None]"),
)  # fmt: skip


def place_of(fragment: str, tree: Path) -> tuple[Path, re.Match[str]] | None:
    """The only place of a fragment in the package; None if there is none, or more than one."""
    pattern = re.compile(r"\s+".join(map(re.escape, fragment.split())))
    files = sorted((tree / "sinkscope").rglob("*.py"))
    found = [(file, match) for file in files for match in pattern.finditer(file.read_text())]
    return found[0] if len(found) == 1 else None


def tried(fragment: str, replacement: str, tests: str, tree: Path) -> str:
    """Apply a mutant in `tree`, run the tests, and undo it: killed, survived, hung, or what went wrong."""
    place = place_of(fragment, tree)
    if place is None:
        return "stale"
    file, match = place
    before = file.read_text()
    file.write_text(before[: match.start()] + replacement + before[match.end() :])
    words = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--timeout", str(TIMEOUT)]
    command = [sys.executable, "-m", "pytest", *words, *(f"tests/{name}" for name in tests.split())]
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    finally:
        file.write_text(before)
    if "Timeout (>" in done.stdout + done.stderr:
        return "hung"
    return {0: "survived", 1: "killed"}.get(done.returncode, f"pytest failed: {done.stdout.strip()[-300:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what there is and what is stale, and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants")
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not args.only or mutant[0] in args.only]
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        if not args.list:
            shutil.copytree(TREE, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", "figures/*.json", "shared"))
        for name, tests, fragment, replacement in chosen:
            if args.list:
                place = place_of(fragment, TREE)
                results[name] = "stale" if place is None else str(place[0].relative_to(TREE))
            else:
                results[name] = tried(fragment, replacement, tests, copy)
            print(f"{name}: {results[name]}", flush=True)
    alive = [name for name, result in results.items() if not args.list and result != "killed" or result == "stale"]
    print(f"{len(results) - len(alive)} of {len(results)} are {'found' if args.list else 'killed'}.")
    return int(bool(alive) or not results)


if __name__ == "__main__":
    sys.exit(main())
