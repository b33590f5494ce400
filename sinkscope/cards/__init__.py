"""Everything that is measured of a model on one page: the sink card."""
