"""Memory Maze."""
