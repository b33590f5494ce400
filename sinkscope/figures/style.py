"""Colours and layout that drawings share."""

# Okabe and Ito's colours: told apart also without colour vision
BLUE, ORANGE, GREEN, GREY, RED = "#0072b2", "#e69f00", "#009e73", "#8c8c8c", "#d55e00"
BAND = "rgba(140,140,140,0.25)"
