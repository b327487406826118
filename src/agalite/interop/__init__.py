"""Our memory models inside other libraries' trainers; each in a module of its own."""
