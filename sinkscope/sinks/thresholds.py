"""Every number from which something counts in this room: what it decides, and where it is from.

"Chosen" means chosen here: the value fits SmolLM2 and Gemma 3, and the planted models of the tests.
"""

# --- heads and places ---
READS = 0.3  # mean attention above which a head attends to a place (Gu et al. 2025)
NARROWEST = 24  # heads of smaller windows are not judged, because every position gets much attention there; chosen
LATER = 16  # later queries that a place needs to be judged by its attention; chosen
SINK_HEADS = 2  # heads that an attention sink needs; chosen: one head may prefer a word
POSITION_SHARE = 0.01  # ... and this share of the heads, if they attend to a position in most texts; chosen
PLACE_SHARE = 0.05  # ... or this share at any other place: a few heads that prefer one word are no sink; chosen
MOST_TEXTS = 0.5  # share of the cases in which a head attends to a position, to attend to it in most; a majority
LEAST_CASES = 3  # positions that a place needs; the fewest with a margin
SOME_TEXTS = 0.2  # share of the texts that have to have a place; chosen
ENOUGH = 0.9  # share that counts as all: of a place that words cover, of what heads take away; chosen

# --- spikes ---
STANDS_OUT = 3.0  # times the typical norm from which a norm is a spike; chosen
MASSIVE = 30.0  # times the median dimension from which one is massive at all positions; chosen
SMALLEST = 1e-9  # least typical norm: in a hand-made model it can be 0, and it is a divisor
LEAST_TYPICAL = 4  # tokens that a typical norm needs; chosen
SAME = 0.5  # cosine to the direction at the peak from which a layer carries the same spike; chosen
LIKE = 0.9  # cosine from which spikes at two places have one direction; chosen
HALF = 0.5  # share of a spike, of attention, or of a probability that decides; chosen: Yona et al. 2025 give none

# --- parts ---
REMOVED = 0.25  # share of a spike below which it counts as removed; chosen
REMAINS = 0.75  # share of a spike above which no part marked it, and of its heads above which they stay; chosen
COUNTS = 0.1  # share of a spike from which a part or a dimension counts: what it writes, changes, takes over; chosen
LISTED = 0.005  # ... and from which a component is listed; chosen
NAMED = 0.02  # ... and a neuron, if its MLP writes as much; chosen
TRACE = 0.0001  # ... of a neuron that counts together with neurons of parallel columns; chosen
PARALLEL = 0.999  # cosine of two columns from which they are parallel; chosen
ERASES = 0.05  # ... and what is written against it after its peak; chosen
