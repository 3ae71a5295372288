"""mlakit under the models of other libraries. Each package imports its library when it is used."""
