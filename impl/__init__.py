"""What is checked: our own allocators, their kernels and torch reference, and the targets."""
