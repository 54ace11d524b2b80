"""What a release has to hold before it is published: ``make release``."""
