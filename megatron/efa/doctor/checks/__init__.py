"""One module a subject; every module here is imported, and registers its checks by that."""
