"""The types that `auto:BITS` stands for: what errors of each layer cost, and bits where they save most."""
