"""Packed weights in the layers of frameworks, one module a framework. Nothing else imports the frameworks."""
