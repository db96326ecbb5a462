package netcheck

// obeyJoin is a node's part in the collective of all.
func (s *sim) obeyJoin(x *simNode, a Assignment) {
	if a.Rank == 0 {
		s.at(simLatency, Ready{ID: x.id, Test: a.Test, Addrs: []string{"10.0.0.1:1"}})
	}
	r := Result{Test: a.Test, Torch: &TorchResult{BusMBps: s.commBus}}
	if s.commFails {
		r = Result{Test: a.Test, Class: Failed}
	}
	s.at(simComm, Report{x.id, r})
}
