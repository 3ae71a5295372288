"""The MLA functions of other libraries, with their names and argument orders."""
