"""Times: two implementations by turns, with a verdict (`paired`), and the rates that a machine reaches (`ceilings`)."""
