"""What SuperLink and SuperNodes load: the Isthmus installed on their own machine."""
