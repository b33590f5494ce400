"""The commands on two real language models, beside what plain hooks read of them."""
