"""From a policy and a text to measures: quality, sensitivity, decode speed."""
