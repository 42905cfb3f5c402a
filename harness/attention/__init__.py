"""The attention algorithms, each written once over `harness.arithmetic`."""
