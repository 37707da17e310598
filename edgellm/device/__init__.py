"""What a device is, what it should give, and what it gives."""
