"""The paper's experiments, one module each."""
