"""The memory models in other libraries: flax.py makes them modules of Flax NNX and Linen."""
