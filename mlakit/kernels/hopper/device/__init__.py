"""Device code that the topics of this folder share."""
