"""The components of a bundle: packages, models and data sets, their licences, and where from."""
