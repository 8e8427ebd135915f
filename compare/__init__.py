"""The comparison: both decoders with and without graphs, parity beside every figure."""
