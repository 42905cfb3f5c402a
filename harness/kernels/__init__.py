"""Black boxes to judge: attention that torch computes, run as its users run it and seen to have run."""
