"""Loading models, early layers only if that is enough, and where their parts are."""
