"""Where the sinks and the norm spikes of a model are, and the layer and neurons that make them."""
