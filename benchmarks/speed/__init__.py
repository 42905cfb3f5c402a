"""The harness's own speed: each ratio measured in one run."""
