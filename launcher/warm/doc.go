// Package warm starts workers from processes that have imported the job's modules before (Linux).
//
// In mode fork one interpreter, the parent, imports, and forks a child for every local rank, which waits (is parked)
// until it gets its order. In mode standby every one of them is an interpreter that has imported by itself. A worker
// without a ready process, or with an environment other than that of the imports, is started by exec.
//
// The pool decides when to prepare which process; it is pure. Spawner carries it out. The Python of the prepared
// processes is in the directory python.
package warm
