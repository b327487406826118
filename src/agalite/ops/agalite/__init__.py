"""AGaLiTe's attention (Algorithm 4)."""
