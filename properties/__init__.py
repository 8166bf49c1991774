"""What must hold, how sequences are drawn, how one is run and checked, and how a failing one is minimised."""
