// Package remote starts one launcher on each of several hosts, over a remote shell such as ssh, and keeps the
// connection for as long as the launcher runs.
//
// The remote shell executes `sh`, which reads a script from its standard input: no word of a command has to be quoted
// for it. The script executes this same program as the [Agent]: the one that the host has, if it is the same file, or
// else one that is sent. The agent gets a [Memo], starts the launcher and follows its standard input: signals, and its
// end, which is the end of the launcher, too. The launcher's output goes through the two streams of the remote shell
// unchanged; one last line reports how it has ended.
package remote
