"""What a bundle is made of: packages, models and data sets, their licences, and where from."""
