"""LoRA adapters: their files, and the slots that hold them on the device."""
