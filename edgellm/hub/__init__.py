"""Models of the Hugging Face Hub by name: which files a name stands for, their download, directories made of them."""
