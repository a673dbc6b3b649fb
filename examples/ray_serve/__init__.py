"""PolarLM on several machines with Ray Serve: `python -m examples.ray_serve`; see README.md in this folder."""
