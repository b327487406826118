"""GaLiTe's attention (Algorithm 3)."""
