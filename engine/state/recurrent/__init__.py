"""State of recurrent layers: slots, snapshots, and the inputs of short convolutions."""
