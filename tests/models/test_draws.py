"""Random numbers are drawn by a seed of their purpose."""

from sinkscope.models.draws import seed_of


def test_the_seed_of_a_draw_is_the_same_in_every_process_and_differs_by_purpose():
    assert seed_of(0, "controls of layer 3") == 17197100875551572
    seeds = {seed_of(seed, purpose) for seed in range(20) for purpose in ("a", "b", "")}
    assert len(seeds) == 60 and all(0 <= seed < 1 << 63 for seed in seeds)
