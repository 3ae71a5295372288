"""Other libraries' MLA functions under their own names and argument orders."""
