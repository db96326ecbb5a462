package ctl

import (
	"strings"

	"github.com/urfave/cli/v2"

	"dlrover-run/rendezvous"
)

// Headings of the commands.
const (
	ofRun         = "A running job"
	ofMachines    = "Machines, across jobs"
	ofCheckpoints = "A checkpoint directory"
	ofSetup       = "Names of other launchers"
)

// row is a command that connects to a daemon.
type row struct {
	name, arguments, usage string
	do                     func(*call) error
	options                []cli.Flag // before those of the connection
	about                  string
	// without is done without arguments, and needs no daemon; nil: do is.
	without func(*program, *cli.Context) error
}

// commands are all commands, in the order of the help.
func (p *program) commands() []*cli.Command {
	all := append(p.made(ofRun, views()), p.made(ofRun, orders())...)
	node := &cli.Command{Name: "node", Category: ofMachines, ArgsUsage: "mark|clear", Usage: "mark a machine, or clear it",
		Subcommands: p.made("", machineRows())}
	return finished(append(all, node, p.checkpoints(), p.installNames())...)
}

// made are the commands of rows.
func (p *program) made(heading string, rows []row) (made []*cli.Command) {
	for _, r := range rows {
		made = append(made, &cli.Command{
			Name: r.name, Category: heading, ArgsUsage: r.arguments, Usage: r.usage, Description: r.about,
			Flags: connection(r.options...), Action: func(args *cli.Context) error {
				if r.without != nil && args.NArg() == 0 {
					return r.without(p, args)
				}
				return p.call(args, r.do)
			},
		})
	}
	return made
}

// views are the commands that show or collect something.
func views() []row {
	return []row{
		{name: "runs", usage: "list the runs that the daemon keeps", do: (*call).listRuns},
		{name: "top", arguments: "[RUN]", usage: "follow the runs, or one, on the terminal; give orders by keys",
			do: (*call).showTop, options: []cli.Flag{onceOption()}, about: topAbout},
		{name: "status", arguments: "RUN", usage: "show the state of the run, its nodes and checkpoints",
			do: (*call).showStatus, options: []cli.Flag{conditionsOption()}},
		{name: "nodes", arguments: "[RUN]", usage: "list the nodes of a run; without RUN, faulty machines of all jobs",
			do: (*call).showNodes, about: nodesAbout},
		{name: "events", arguments: "RUN", usage: "show what has happened", do: (*call).showEvents,
			options: []cli.Flag{followOption()}, about: eventsAbout},
		{name: "logs", arguments: "RUN", usage: "show the output of all workers, by rank", do: (*call).logs,
			options: logsOptions(), about: "With --json each line of a worker is an object on a line."},
		{name: "exec", arguments: "RUN RANK -- COMMAND...", usage: "execute a command next to the worker of that rank",
			do: (*call).exec, options: []cli.Flag{timeoutOption()}, about: execAbout},
		{name: "verdict", arguments: "RUN", usage: "show which rank failed first, and why", do: (*call).showVerdict},
		{name: "cost", arguments: "RUN", usage: "show the cost of each stop, and the time of the run by class",
			do: (*call).showCost, about: costAbout},
		{name: "hang", arguments: "RUN", usage: "show whether workers hang, and which rank is to blame",
			do: (*call).showHang},
		{name: "stacks", arguments: "[RUN]", usage: "show the stacks of all workers, hung or not", do: (*call).showStacks,
			options: []cli.Flag{stacksPathOption()}, about: stacksAbout, without: (*program).stacksHere},
		{name: "flight", arguments: "RUN", usage: "show which ranks are in which collective, by PyTorch's flight recorders",
			do: showFlight, options: []cli.Flag{pathOption("write the merged recorders there, as JSON")},
			about: flightAbout},
		{name: "profile", arguments: "RUN RANK", usage: "record what the worker of that rank does, for Perfetto",
			do: (*call).profile, options: profileOptions(), about: profileAbout},
		{name: "bundle", arguments: "RUN", usage: "archive stacks, recorders, events and ends of logs", do: (*call).bundle,
			options: []cli.Flag{bundlePathOption()}},
		{name: "open", arguments: "[RUN]", usage: "print a link to the page of the run, or of all runs", do: (*call).openPage,
			about: openAbout},
		{name: "check", arguments: "RUN", usage: "show the results of node checks", do: (*call).showCheck,
			options: checkOptions()},
		{name: "forget", arguments: "RUN", usage: "drop a run that has ended, so that a new one can use its name",
			do: (*call).forget},
	}
}

// orders are the commands that change a run. None asks for a confirmation, because scripts use them.
func orders() []row {
	reason := func() []cli.Flag { return []cli.Flag{reasonOption()} }
	hands := func() []cli.Flag { return []cli.Flag{commandOption(), reasonOption()} }
	return []row{
		{name: "restart", arguments: "RUN" + behindDashes, usage: "stop all workers and start them again",
			options: []cli.Flag{commandOption(), chargeOption(), reasonOption()},
			do:      orderRun(rendezvous.OrderRestart, "its workers are stopped and started anew")},
		{name: "stop", arguments: "RUN", usage: "end the run as failed", options: reason(),
			do: orderRun(rendezvous.OrderStop, "stopped; its workers and launchers end")},
		{name: "pause", arguments: "RUN" + behindDashes, usage: "stop all workers; the launchers stay until resume",
			options: hands(), do: orderRun(rendezvous.OrderPause,
				"paused; its workers are stopped, its launchers stay; to go on: dlroverctl resume RUN")},
		{name: "resume", arguments: "RUN" + behindDashes, usage: "end a pause or a hold", options: hands(),
			do: orderRun(rendezvous.OrderResume, "goes on")},
		{name: "start", arguments: "RUN" + behindDashes, usage: "the same as resume", options: hands(),
			do: orderRun(rendezvous.OrderResume, "its workers are started")},
		{name: "bar", arguments: "RUN NODE", usage: "start no workers on nodes of this name", options: reason(),
			do: orderNode(rendezvous.OrderBar, (*call).barred)},
		{name: "unbar", arguments: "RUN NODE", usage: "allow workers there again", options: reason(),
			do: orderNode(rendezvous.OrderUnbar, (*call).unbarred)},
		{name: "drain", arguments: "RUN NODE", usage: "save, make the node leave, and bar it", options: reason(),
			do: orderNode(rendezvous.OrderDrain, (*call).drained)},
		{name: "log-level", arguments: "RUN LEVEL", options: []cli.Flag{nodeOption()}, do: (*call).setLogLevel,
			usage: "set the log level of the launchers: " + strings.Join(levels(), ", ")},
	}
}

// machineRows are the commands about a machine, across jobs.
func machineRows() []row {
	return []row{
		{name: "mark", arguments: "NODE", usage: "mark a machine until it is cleared; needs --reason",
			options: []cli.Flag{reasonOption()}, do: func(c *call) error { return c.changeMachine("mark") }},
		{name: "clear", arguments: "NODE", usage: "remove the mark, and forget what was found",
			options: []cli.Flag{reasonOption()}, do: func(c *call) error { return c.changeMachine("clear") }},
	}
}
