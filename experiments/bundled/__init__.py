"""How the bundled model is made: corpus, planted circuit, training, measurements, model card."""
