"""The place of image preprocessing, vision families and the vision runner. Nothing is here yet."""
