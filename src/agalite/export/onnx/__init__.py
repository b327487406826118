"""Conversion of a JAX function to ONNX.

`program` flattens the traced function to a list of equations, `random_numbers` expands JAX's random
primitives on the way, `rules` has the ONNX form of each primitive (`products` and `indexing` the
longer ones), `graph` assembles the model, and `file` writes and opens it.
"""
