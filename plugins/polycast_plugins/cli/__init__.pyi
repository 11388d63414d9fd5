from polycast.plugin import Plugin

from .command_line import app as app
from .terminal import check_output as check_output
from .terminal import console as console
from .terminal import library_errors as library_errors
from .terminal import print_json as print_json
from .terminal import print_line as print_line
from .terminal import print_result as print_result

plugin: Plugin

def main() -> None: ...
