// dlrover-master is the rendezvous daemon of training jobs as a process of its own:
// it outlives every launcher, and running workers outlive it.
package main

import "dlrover-run/internal/app/master"

func main() { master.Main() }
