"""Ways to share one training between ranks: one file each."""
