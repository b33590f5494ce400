"""Tables of Yona et al. 2025, beside what is measured here."""
