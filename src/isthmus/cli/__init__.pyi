from isthmus.cli.command import Command as Command
from isthmus.cli.command import add as add
from isthmus.cli.command import add_json as add_json
from isthmus.cli.command import print_json as print_json
from isthmus.cli.command import whole as whole
from isthmus.cli.program import commands as commands
from isthmus.cli.program import main as main
from isthmus.cli.program import parser as parser
