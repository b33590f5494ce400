"""What attention does while text is generated: barcodes, locking heads, and the invariance behind loops."""
